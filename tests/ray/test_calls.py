"""Calls are applied once and in order, whatever is lost, repeated, delayed or restarted. Without Ray.

The network delivers messages in any order, also long after their client gave up on them and to a later incarnation. The shard
is a list of the calls it applied; a crash takes it back to its last save that was written.
"""

from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fbuf.ray._calls import Away, Ledger, Outbox

DURABLE, FLEETING = 1, 2
CLIENTS = st.sampled_from([DURABLE, FLEETING])


@dataclass(eq=False)
class Message:
    client: int
    number: int
    oldest: int
    payload: Any
    answer: Any = None
    is_lost: bool = False  # for the client; it may still arrive


class Calls(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.ledger, self.applied = Ledger(), list[tuple[int, int]]()
        self.saved = list(self.applied), self.ledger.arrays()
        self.network = []
        self.crashes = 0
        self.posted = {DURABLE: 0, FLEETING: 0}
        self.boxes = {client: self.outbox(client) for client in self.posted}

    def outbox(self, client):
        def send(number, oldest, payload):
            message = Message(client, number, oldest, payload)
            self.network.append(message)
            return message

        return Outbox(send, in_flight=3, durable=client == DURABLE)

    def apply(self, message):
        if self.ledger.is_next(message.client, message.number, message.oldest):
            assert message.payload == message.number
            self.applied.append((message.client, message.payload))
            self.ledger.finish(message.client, message.number)
        if not message.is_lost:
            message.answer = self.ledger.receipt(message.client)

    def result(self, message):
        while message.answer is None and not message.is_lost:
            self.apply(self.network.pop(0))
        if message.answer is None:
            raise Away
        return message.answer

    def receive_one(self, client):
        box = self.boxes[client]
        box.pump()
        try:
            box.receive(self.result)
        except Away:
            box.resend()

    @rule(client=CLIENTS)
    def post(self, client):
        self.posted[client] += 1
        self.boxes[client].post(self.posted[client])

    @rule(client=CLIENTS)
    def receive(self, client):
        if len(self.boxes[client]):
            self.receive_one(client)

    @precondition(lambda self: self.network)
    @rule(data=st.data(), keep=st.booleans())
    def deliver(self, data, keep):
        """Out of order; kept, it is delivered again."""
        at = data.draw(st.integers(0, len(self.network) - 1))
        message = self.network[at] if keep else self.network.pop(at)
        self.apply(message)

    @rule(meanwhile=st.integers(0, 3))
    def save(self, meanwhile):
        """Copy the calls, apply some more, and note that the copy is written."""
        self.saved = list(self.applied), self.ledger.arrays()
        for message in self.network[:meanwhile]:
            self.apply(message)
        self.ledger.saved(self.saved[1])

    @rule()
    def crash(self):
        self.applied, self.ledger = list(self.saved[0]), Ledger(self.saved[1])
        self.crashes += 1
        for message in self.network:
            message.is_lost = message.answer is None

    @invariant()
    def is_in_order_and_once(self):
        for client in self.posted:
            numbers = [number for other, number in self.applied if other == client]
            assert numbers == sorted(set(numbers))
            if client == DURABLE:
                assert numbers == list(range(1, len(numbers) + 1))

    def teardown(self):
        for client, box in self.boxes.items():
            while len(box):
                self.receive_one(client)
            while client == DURABLE and box.kept:
                self.save(0)
                box.note(self.ledger.receipt(client))
                while len(box):
                    self.receive_one(client)
            numbers = [number for other, number in self.applied if other == client]
            if client == DURABLE or not self.crashes:
                assert numbers == list(range(1, self.posted[client] + 1))
            assert not box.kept
        self.is_in_order_and_once()


TestCalls = Calls.TestCase
TestCalls.settings = settings(stateful_step_count=40, max_examples=4 * settings.default.max_examples)


def test_a_ledger_forgets_the_clients_that_wrote_longest_ago(monkeypatch):
    monkeypatch.setattr("fbuf.ray._calls._MOST", 2)
    ledger = Ledger()
    for client in (1, 2, 1, 3):
        ledger.finish(client, 5)
    assert [ledger.receipt(client).done for client in (1, 2, 3)] == [5, 0, 5]
    assert Ledger(ledger.arrays()).receipt(3) == (5, 5)
