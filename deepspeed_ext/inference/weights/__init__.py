"""Taking a model's weights: loading, quantizing, memory."""
