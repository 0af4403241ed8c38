"""Objects in buckets, on the Hugging Face hub and on web servers: one port, and a local cache of what is read."""
