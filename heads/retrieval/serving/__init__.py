"""``xret serve``: a web page and a JSON endpoint over a `Retriever`."""
