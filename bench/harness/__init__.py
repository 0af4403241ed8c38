"""What the scripts in ``bench`` share: command lines, runs that they begin and watch, links, processes, and figures."""
