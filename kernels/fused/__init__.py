"""Triton kernels for the work between two GEMMs of a layer. Imported where Triton is; the plain torch twins stand in
kernels/norm.py, rope.py and activation.py. argmax.py and rescore.py read logits; selfcheck.py, which anyone may import, tells
whether they run."""
