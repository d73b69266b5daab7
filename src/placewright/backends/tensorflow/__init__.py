"""Everything that knows TensorFlow: reading models, running them, putting placements into them."""
