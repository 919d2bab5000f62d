"""JAX's scans over the LSTM and the GRU of `loops.py`: what each takes, one line of JSON a way.

Needs jax, and equinox for its own. Run by a Python that has them: `jax_loops.py lstm STEPS HIDDEN INPUT BATCH THREADS`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

ROUNDS = 3


def main(name: str, steps: int, hidden: int, inputs: int, batch: int, threads: int) -> None:
    # XLA's thread pool has as many threads as the process has cores; products of Eigen can be kept to one.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    os.environ["XLA_FLAGS"] = f"--xla_cpu_multi_thread_eigen={'true' if threads > 1 else 'false'}"
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 6)
    gates = {"lstm": 4, "gru": 3}[name] * hidden
    bound = 1 / math.sqrt(hidden)
    shapes = {"wi": (gates, inputs), "wh": (gates, hidden), "bi": (gates,), "bh": (gates,)}
    weights = {
        k: jax.random.uniform(key, shape, minval=-bound, maxval=bound)
        for (k, shape), key in zip(shapes.items(), keys, strict=False)
    }
    xs = jax.random.normal(keys[4], (steps, batch, inputs))
    zeros = jnp.zeros((batch, hidden))

    def lstm(w: Any, carry: Any, x: Any) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(x @ w["wi"].T + w["bi"] + h @ w["wh"].T + w["bh"], 4, 1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), jnp.mean(h * h)

    def gru(w: Any, carry: Any, x: Any) -> Any:
        h, key = carry
        ri, zi, ni = jnp.split(x @ w["wi"].T + w["bi"], 3, 1)
        rh, zh, nh = jnp.split(h @ w["wh"].T + w["bh"], 3, 1)
        z = jax.nn.sigmoid(zi + zh)
        h = (1 - z) * jnp.tanh(ni + jax.nn.sigmoid(ri + rh) * nh) + z * h
        key, drawn = jax.random.split(key)
        h = jnp.where(jax.random.bernoulli(drawn, 0.9, h.shape), h / 0.9, 0.0)
        return (h, key), jnp.mean(h * h)

    step = {"lstm": lstm, "gru": gru}[name]
    carry = {"lstm": (zeros, zeros), "gru": (zeros, keys[5])}[name]
    size = next(s for s in range(math.isqrt(steps), 0, -1) if steps % s == 0)

    def whole(w: Any, body: Callable[..., Any], carry: Any, xs: Any) -> Any:
        return jax.lax.scan(lambda c, x: body(w, c, x), carry, xs)

    def scan(w: Any) -> Any:
        return whole(w, step, carry, xs)[1].sum()

    def each_checkpointed(w: Any) -> Any:
        return whole(w, jax.checkpoint(step), carry, xs)[1].sum()

    def segments(w: Any) -> Any:
        inner = jax.checkpoint(lambda w, c, x: whole(w, step, c, x))
        return whole(w, inner, carry, xs.reshape(-1, size, batch, inputs))[1].sum()

    ways = {"JAX lax.scan": scan, "JAX jax.checkpoint of each step": each_checkpointed}
    ways["JAX jax.checkpoint, segments of √T"] = segments
    count = math.isqrt(steps)
    ways[f"equinox, {count} checkpoints"] = _equinox(step, carry, xs, count)
    for label, way in ways.items():
        try:
            print(json.dumps({label: _taken(jax, way, weights)}), flush=True)
        except Exception as error:  # another version of a peer may not have this way
            print(label, type(error).__name__, error, file=sys.stderr)


def _equinox(step: Callable[..., Any], carry: Any, xs: Any, count: int) -> Callable[[Any], Any]:
    """Equinox's scan with so many checkpoints, placed online."""

    def way(w: Any) -> Any:
        from equinox.internal import scan

        return scan(lambda c, x: step(w, c, x), carry, xs, kind="checkpointed", checkpoints=count)[1].sum()

    return way


def _taken(jax: Any, way: Callable[[Any], Any], weights: Any) -> dict[str, float]:
    start = time.perf_counter()
    run = jax.jit(jax.value_and_grad(way)).lower(weights).compile()
    jax.block_until_ready(run(weights))
    first_call_s = time.perf_counter() - start
    memory = run.memory_analysis()
    walls = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(run(weights))
        walls.append(time.perf_counter() - start)
    peak_bytes = memory.temp_size_in_bytes + memory.output_size_in_bytes
    return {"peak_bytes": peak_bytes, "wall_s": median(walls), "first_call_s": first_call_s}


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
