"""Weights of a run, published at a place in object storage as they are made."""
