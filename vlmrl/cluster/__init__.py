"""One run on many processes, as Ray's actors: `ray_cluster.py` starts them, `workers.py` is what they do.

The driver plays the episodes and keeps no weights. Samples go to the trainer ranks and prompts to the engines through Ray's object
store, each image once per node; weights go from the ranks to the engines and do not pass the driver.
"""


class ClusterError(RuntimeError):
    """A process of the run died, did not answer in time, or could not be placed."""
