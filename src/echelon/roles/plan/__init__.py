"""The plan of a run: the one place that knows its modes.

Engine, acting, experience, transports, workers or actors, one learner or several: what they mean for a run is decided
here, once, and the roles are handed the parts that follow from it. `start` comes first and needs no torch;
`preparation` checks what can be checked before anything is made; `parts` makes what the roles work with, each imported
where it is made.
"""
