"""The chain of stages that a profile gives the solver: the options of each region, with their bytes and seconds.

Start from `treatments.treat`, `region_ways.MeasuredRegion` and `modelling.model_of`.
"""
