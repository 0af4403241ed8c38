"""Plans for one's own sites: learners, meshes, settings and links."""
