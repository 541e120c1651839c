"""Containers, names and tensors that a region reads, with what they held when it first ran, to be restored for a re-run.

Start from `values.saved_item`, `containers.DictHolder`, `places.PlaceHolder` and `tensor_attributes.attributes_of`.
"""

__all__ = ["containers", "places", "tensor_attributes", "values"]
