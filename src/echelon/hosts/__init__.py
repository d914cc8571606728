"""Several hosts: an agent on each starts that host's roles and exchanges their data with the head.

On every host the roles use shared memory only. The head is the host of the coordinator and the learner. An agent
(`agent`, `echelon host --join`) has two connections to it. On the connection for control (`engine`, in the coordinator)
it receives the roles to start and reports how they do. On the connection for bulk (`bulk`, and `roles.carrier`, a role
of the head) slots go up, and weights and grants come down.
"""
