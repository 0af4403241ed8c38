"""The simulator: what a run would do on machines that one does not have, by the product's own decisions."""
