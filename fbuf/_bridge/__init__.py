"""What connects compiled JAX programs with stores on the host: callbacks, lifetimes, rows read on demand."""
