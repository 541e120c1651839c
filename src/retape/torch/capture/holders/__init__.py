"""Containers, names and tensors that a region reads, with their first values, restored for a re-run.

Start from `values.saved_item`, `containers.DictHolder`, `places.PlaceHolder` and `tensor_attributes.attributes_of`.
"""

__all__ = ["containers", "places", "tensor_attributes", "values"]
