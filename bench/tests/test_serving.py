"""Clients against a small server that streams as OpenAI's does."""

import http.server
import json
import threading
import unittest

import serving
from engines import Failed

STATUS = "Name:\tserver\nVmPeak:\t  400000 kB\nVmHWM:\t  160000 kB\nVmRSS:\t  151020 kB\nRssAnon:\t  41410 kB\nRssFile:\t  109610 kB\n"


class Echo(http.server.BaseHTTPRequestHandler):
    """Says the prompt's first word `max_tokens` times; breaks off before the end where it is "broken"."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["stream"] and body["ignore_eos"] and body["temperature"] == 0
        word = body["prompt"].split()[0]
        self.send_response(200)
        self.end_headers()
        said = 1 if word == "broken" else body["max_tokens"]
        # The first event has no text, as when a token is half a character.
        texts = ["", *[f" {word}"] * said]
        events = [{"choices": [{"index": 0, "text": text}], "usage": None} for text in texts]
        events.append({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": said}})
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


class Clients(unittest.TestCase):
    def setUp(self):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        self.addCleanup(server.server_close)
        self.addCleanup(thread.join)
        self.addCleanup(server.shutdown)
        self.server = serving.Server(None, server.server_address[1], 0.0)

    def test_answers_come_in_their_order(self):
        answers = self.server.ask_together(["one a", "two b", "three c"], 3)
        self.assertEqual([a["text"] for a in answers], [" one" * 3, " two" * 3, " three" * 3])
        for a in answers:
            self.assertEqual(a["tokens"], 3)
            self.assertLess(a["sent"], a["first"])
            self.assertLess(a["first"], a["end"])

    def test_too_few_tokens_are_no_result(self):
        with self.assertRaisesRegex(Failed, "1 of 3 tokens"):
            self.server.ask("broken", 3)
        with self.assertRaisesRegex(Failed, "a client of 2 failed"):
            self.server.ask_together(["broken", "one"], 3)


class Parts(unittest.TestCase):
    def test_prompts_are_repeatable_and_differ(self):
        self.assertEqual(serving.prompt(200, "0 1"), serving.prompt(200, "0 1"))
        self.assertNotEqual(serving.prompt(200, "0 1"), serving.prompt(200, "0 2"))
        self.assertEqual(len(serving.prompt(200, "0 1").split()), 200)

    def test_memory_of_a_process(self):
        expected = {"memory": 154644480, "memory, mapped files": 112240640, "memory at most": 163840000}
        self.assertEqual(serving.memory_of(STATUS), expected)

    def test_an_error_in_the_stream(self):
        with self.assertRaises(Failed):
            serving.read_event(b'data: {"error": {"message": "gone"}}\n', {})


if __name__ == "__main__":
    unittest.main()
