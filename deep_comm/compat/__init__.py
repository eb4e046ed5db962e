"""The drop-in: what programs written for DeepEP import as ``deep_ep``.

``deep_comm compat install`` makes ``import deep_ep`` this one, ``uninstall`` takes it
back, ``path`` prints a folder for PYTHONPATH instead. Nothing happens unless asked.

``legacy`` is V1 (``Buffer``), ``elastic`` is V2 (``ElasticBuffer``), both over
``deep_comm.Buffer``; ``site/deep_ep`` is the package that gets the name, a few imports long.
"""
