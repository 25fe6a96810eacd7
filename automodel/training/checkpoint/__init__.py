"""Checkpoints: what is saved, the folder it stands in, and how a run goes on from it.

A checkpoint is a folder ``step_<N>`` with one safetensors file for each rank that had something to write, an index
``checkpoint.json`` and a marker. Nothing in it is pickled. It is written beside, as ``.step_<N>.partial``, and
appears by one rename.

- ``folder.py``: names, completeness and retention; free of torch, for the launcher
- ``pieces.py``: this rank's part of each tensor, by name, whatever the layout
- ``storage.py``: torch's distributed checkpoint on safetensors files and a JSON index
- ``saver.py``: when and how to save; ``loader.py``: checks, then the way back
"""
