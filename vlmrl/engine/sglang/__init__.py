"""SGLang as a server program: how it is started, and its dialect of HTTP."""
