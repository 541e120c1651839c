"""`odeint`: differential equations, discretised and then differentiated, on top of `loops`.

Start from `odeint.odeint`, `steps` and `control`.
"""
