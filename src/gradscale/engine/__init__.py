"""One step without a framework: everything that is not a kernel."""
