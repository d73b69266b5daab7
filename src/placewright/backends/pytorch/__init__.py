"""PyTorch: modules in as graphs, plans out as placed modules. Importing it imports no torch."""
