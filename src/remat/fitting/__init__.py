"""How `remat.fit` finds the loops of blocks inside a model, weighs what lies outside of them, and runs them.

Layers within: seams (calls of blocks, answered) → pending (values that do not exist yet) → loops (what a trial found)
→ running (the model with its loops taken out) → outside (what the rest of it costs) → planning (who gets how much).
"""
