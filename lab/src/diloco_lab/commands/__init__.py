"""The subcommands of ``diloco simulate``: options in, tables or JSON out; what they show is computed beside them."""
