"""Three real models in three pools under one limit: ``python -m torch_vmm demo``.

``text``, ``digits`` and ``encoder`` are ordinary torch programs that know
nothing of pools. ``run`` puts each into a pool and lets them take turns;
``monitor`` watches the memory, ``display`` shows it.
"""
