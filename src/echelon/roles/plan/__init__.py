"""The plan of a run: the only package that depends on the modes of a run.

The modes are the engine, acting, experience, transports, workers or actors, and one or several learners. Their
consequences are decided here once, and the roles receive the parts that follow. `start` runs first and does not import
torch. `preparation` makes all checks that are possible before anything is created. `parts` creates the objects that the
roles use and imports their modules only when needed.
"""
