"""What `gradscale doctor` runs: a few steps of a training, and the kernels of a device."""
