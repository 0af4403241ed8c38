"""Shared parts of the scripts in ``bench``: command lines, runs that they begin and watch, links, processes, and figures."""
