"""Act requests over TCP: the same board, with seats on other hosts.

`RemoteSeat` is a `Seat` whose arrays are private memory: `ask` sends them as one frame. `ActDoor` stands beside the
server's `Batcher`: it lays the frames on the board, where they are found like any question of this host, and sends the
answers back.

Who waits: a client for its answer, on its socket; a server in `ActDoor.next`, on socket, gate and doorbell at once.
What bounds it: a seat has one question under way, and a queue holds a few messages per connection. If a server dies,
its clients' connections heal by themselves and each repeats its question until it is answered; a repeated count is
answered again from the board, never computed twice. If a client dies, nobody waits for it after one round (`Batcher`);
its successor comes with a higher incarnation, and what the old one may still send is refused. A frame that breaks the
rules costs its sender the connection: nothing more is read from it.
"""

from __future__ import annotations

from echelon.transport.act_door import ActDoor, Bounds
from echelon.transport.remote_seat import RemoteSeat, wait_any

__all__ = ["ActDoor", "Bounds", "RemoteSeat", "wait_any"]
