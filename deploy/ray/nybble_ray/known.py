"""What this process knows of the replicas. In a module of its own: Ray copies a router's module into each process that
routes, and a variable there would be a copy, too."""

# The node of each replica that calls of this process may go to, by its name.
replicas: dict[str, str] = {}
