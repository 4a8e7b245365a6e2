"""Environments of another make as an Env: Gymnasium's, the tools of an MCP server, an env that another process serves."""
