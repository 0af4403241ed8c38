"""A model's tensors: cut into fragments, quantised, compressed, merged, and moved by the outer step."""
