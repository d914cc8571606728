"""Several hosts: an agent on each starts that host's roles and carries between hosts what must cross.

On every host the roles see only shared memory. The head is the host of the coordinator and the learner; an agent
(`agent`, `echelon host --join`) joins it over two connections. By the one for control (`engine`, in the coordinator) it
is told what to start and tells how its roles do; by the one for bulk (`roles.carrier`, a role of the head) slots go up
and weights and grants come down.
"""
