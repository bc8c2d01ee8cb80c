"""Clean Slate's node program: find, prove, end and remove what a dead LLM server left on a GPU node."""

__version__ = "0.1.0"
