"""C++ sources of the device kernels; this package only marks the folder so that its files can be found."""
