"""Code that runs inside a model rank."""
