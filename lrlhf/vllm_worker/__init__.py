"""What runs inside vLLM's own processes: receiving weights, and guarding the server.

It imports torch and vLLM only, so that a worker starts without the rest of the library.
"""
