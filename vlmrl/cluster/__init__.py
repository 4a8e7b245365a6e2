"""One run on many processes, as Ray's actors: `ray_cluster.py` starts them, `workers.py` has their classes.

The driver plays the episodes and keeps no weights. Samples go to the trainer ranks and prompts to the engines through Ray's object
store, each image once per node. Weights go from the ranks to the engines without passing the driver.
"""


class ClusterError(RuntimeError):
    """A process of the run died, did not answer in time, or could not be placed."""
