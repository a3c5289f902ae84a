"""Redis Cluster: the broker that finds the node of each slot."""
