"""Other people's trainers with a memory budget: each a thin call of `remat.fit` at the right moment.

Each module needs the library whose name it bears, an extra of this package: `pip install remat[transformers]`.
"""
