"""One engine: its actor, its interface, requests and episodes."""
