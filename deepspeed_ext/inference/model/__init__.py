"""What a model is: sizes, names of weights, positions, the folder that it came in."""
