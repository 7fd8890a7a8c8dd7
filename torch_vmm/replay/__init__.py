"""``torch-vmm replay``: a recorded memory history, and what this allocator would have done with the same program.

``dump`` reads what ``torch.cuda.memory._dump_snapshot`` wrote, ``trace`` makes a program of one device's history,
``outcome`` runs it, ``report`` and ``picture`` show it, ``run`` is the command.
"""
