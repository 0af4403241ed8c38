"""A cluster in virtual time: the services as they are, with another loop, another server and another network."""
