"""Measuring the linear kernels on the machine that is here: problems, cold timing, the kernels of others beside ours."""
