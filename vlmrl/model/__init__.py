"""How a Hugging Face model is run: what differs between families in `families.py`, the one adapter in `policy.py`."""
