#!/usr/bin/env python3
"""The chat page and the statistics page in headless Chromium, on the running program.

Usage: browser_test.py PROGRAM OUT_DIR [unittest options]. The program serves the model that ships on a free port of
loopback; screenshots go to OUT_DIR. What a model can't be made to say (scripts, broken streams, refusals) is put into
the replies on their way to the page. Each test also fails when the page raises an error, breaks its content security
policy, or asks anything of another origin. Exit status 77 where Chromium or Playwright is missing.
"""
import json
import os
import re
import signal
import subprocess
import sys
import time
import unittest
import urllib.request

CHROMIUM = "/usr/bin/chromium"
try:
    from playwright.sync_api import expect, sync_playwright
except ImportError:
    print("skipped: the Python package playwright is missing")
    sys.exit(77)
if not os.path.exists(CHROMIUM):
    print(f"skipped: {CHROMIUM} is missing")
    sys.exit(77)
if len(sys.argv) < 3:
    print("usage: browser_test.py PROGRAM OUT_DIR [unittest options]", file=sys.stderr)
    sys.exit(2)

PROGRAM, OUT = sys.argv[1:3]
DESKTOP = {"width": 1280, "height": 860}
PHONE = {"width": 375, "height": 740}
STORY = "Tell me a story about a little fox."
ANSWER = ".answer .md:not(.body)"

# Runs before the page's own scripts: what the policy stopped is remembered, and answers are the likeliest ones.
WATCH = """window.violations = [];
document.addEventListener("securitypolicyviolation", (e) => window.violations.push(e.violatedDirective + " " + e.blockedURI));
localStorage.setItem("deepinfer.defaults", '{"temperature": "0"}');"""

SAMPLE = """## How it works

Text with **bold**, *italic*, ~~struck~~, `code` and [a link](https://example.org/a).

1. first
   - inner **one**
   - inner two
2. second

| kind | bytes |
|:-----|------:|
| full | 1,152 |

> quoted

```python
def f(n):
    return n + 1  # next
```

---

- [x] done
- [ ] to do
"""

ATTACK = """<script>window.pwned = 1</script><img src=x onerror="window.pwned = 1"><iframe src="https://evil.example/"></iframe>

<svg onload="window.pwned = 1"><style>body { display: none }</style>

[a](javascript:window.pwned=1) [b](JaVaScRiPt:window.pwned=1) [c](data:text/html,<script>window.pwned=1</script>)
[d](java&#115;cript:window.pwned=1) [e](vbscript:x) [f](//evil.example/x) [g](file:///etc/passwd) [h]( javascript:window.pwned=1)
[i](https://ok.example/"onmouseover="window.pwned=1) <javascript:window.pwned=1> ![j](https://evil.example/pixel.png)
[![k](javascript:window.pwned=1)](javascript:window.pwned=1) [l](\x01javascript:window.pwned=1) https://ok.example/<script>

```"><script>window.pwned=1</script>
</code></pre><script>window.pwned = 1</script>
```

| <b onclick="window.pwned=1">x</b> | [m](javascript:window.pwned=1) |
|---|---|
| <img src=x onerror=window.pwned=1> | `</td><script>window.pwned=1</script>` |

# <a href="javascript:window.pwned=1">n</a>
> <object data="https://evil.example/"></object>

<form action="https://evil.example/"><button>send</button></form> <meta http-equiv=refresh content="0;url=https://evil.example/">
"""


class Server:
    """The program under `serve`."""

    def __init__(self, *options, port=0):
        self.process = subprocess.Popen([PROGRAM, "serve", "--port", str(port), *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                        text=True)
        line = self.process.stdout.readline()
        match = re.search(r"listening on (http://127\.0\.0\.1:(\d+))", line)
        if not match:
            self.kill()
            raise RuntimeError(f"the program did not say where it listens, but '{line.strip()}'")
        self.origin, self.port = match.group(1), int(match.group(2))
        for _ in range(300):
            try:
                urllib.request.urlopen(self.origin + "/health", timeout=5)
                return
            except OSError:
                time.sleep(0.1)
        self.kill()
        raise RuntimeError("the model was not loaded within 30 seconds")

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


def setUpModule():
    global server, playwright, browser
    os.makedirs(OUT, exist_ok=True)
    server = Server()
    playwright = sync_playwright().start()
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
    expect.set_options(timeout=10_000)


def tearDownModule():
    browser.close()
    playwright.stop()
    server.kill()


def sse(*chunks, end="data: [DONE]\n\n"):
    return "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + end


def piece(**delta):
    return {"model": "tiny", "choices": [{"index": 0, "delta": delta}]}


LAST = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 20, "completion_tokens": 40, "total_tokens": 60,
                  "completion_tokens_details": {"reasoning_tokens": 12, "accepted_prediction_tokens": 15, "rejected_prediction_tokens": 5}}}


class Page(unittest.TestCase):
    viewport = DESKTOP
    scheme = "light"
    allowed_errors = ()

    def setUp(self):
        self.context = browser.new_context(viewport=self.viewport, color_scheme=self.scheme, accept_downloads=True)
        self.context.add_init_script(WATCH)
        self.requests, self.errors = [], []
        self.origin = server.origin
        self.page = self.open()

    def tearDown(self):
        violations = [v for page in self.context.pages for v in page.evaluate("window.violations || []")]
        self.context.close()
        self.assertEqual([u for u in self.requests if not u.startswith((self.origin + "/", "data:", "blob:" + self.origin))], [])
        self.assertEqual(violations, [])
        self.assertEqual([e for e in self.errors if "Failed to load resource" not in e], [])

    def open(self, path="/"):
        page = self.context.new_page()
        page.on("request", lambda r: self.requests.append(r.url))
        page.on("pageerror", lambda e: self.errors.append(str(e)))
        page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        page.on("dialog", lambda d: (self.errors.append("dialog: " + d.message), d.dismiss()))
        page.goto(self.origin + path)
        if path.startswith("/#") or path == "/":
            page.wait_for_selector("html[data-ready]")
        return page

    def reply(self, *bodies, status=200, headers=None):
        """Answers the next chat completions with these bodies, one each; later ones go to the server."""
        left = list(bodies)

        def handle(route):
            if not left:
                return route.continue_()
            body = left.pop(0)
            kind = "text/event-stream" if status == 200 else "application/json"
            return route.fulfill(status=status, body=body, headers={"content-type": kind, **(headers or {})})

        self.page.unroute("**/v1/chat/completions")
        self.page.route("**/v1/chat/completions", handle)

    def say(self, *texts):
        self.reply(sse(piece(role="assistant", content=""), *[piece(content=t) for t in texts], LAST))

    def endless(self, tokens=3000):
        """Answers don't end by themselves, so that there is something to stop."""

        def handle(route):
            body = json.loads(route.request.post_data)
            body.update(max_tokens=tokens, ignore_eos=True)
            route.continue_(post_data=json.dumps(body))

        self.page.unroute("**/v1/chat/completions")
        self.page.route("**/v1/chat/completions", handle)

    def ask(self, text, page=None):
        page = page or self.page
        page.fill("#composer-text", text)
        page.press("#composer-text", "Enter")
        expect(page.locator(".user .text").last).to_have_text(text)

    def finished(self, page=None):
        expect((page or self.page).locator("#send")).to_have_attribute("aria-label", "Send", timeout=20_000)
        expect((page or self.page).locator("[aria-busy=true]")).to_have_count(0, timeout=20_000)

    def answer(self):
        return self.page.locator(ANSWER).last.inner_text()

    def shot(self, name, page=None, **options):
        (page or self.page).screenshot(path=os.path.join(OUT, name + ".png"), **options)


class Conversation(Page):
    def test_an_answer_streams_and_its_figures_are_shown(self):
        lengths = set()
        self.endless(600)
        self.ask(STORY)
        for _ in range(200):
            lengths.add(len(self.answer()))
            if self.page.locator("#send").get_attribute("aria-label") == "Send" and len(lengths) > 1:
                break
            self.page.wait_for_timeout(20)
        self.finished()
        self.assertGreater(len(lengths), 3, "the text came in one piece")
        facts = self.page.locator(".facts-button").last
        expect(facts).to_contain_text("600 tokens")
        expect(facts).to_contain_text("tokens/s")
        facts.click()
        expect(self.page.locator(".actions .keys").last).to_contain_text("First token")
        expect(self.page.locator("#context-text")).to_contain_text(re.compile(r"Context [\d,]+ of [\d,]+"))
        expect(self.page.locator("#title")).to_have_text(STORY)
        expect(self.page.locator("#announcer")).to_contain_text("The answer is complete.")

    def test_stop_continue_and_regenerate(self):
        self.endless()
        self.ask(STORY)
        expect(self.page.locator(ANSWER).last).to_contain_text(re.compile(r"\w+ \w+"))
        self.page.keyboard.press("Escape")
        self.finished()
        stopped = self.answer()
        self.page.wait_for_timeout(300)
        self.assertEqual(self.answer(), stopped)
        expect(self.page.locator(".facts-button").last).to_contain_text("stopped")
        self.page.unroute("**/v1/chat/completions")
        self.page.locator(".answer [data-action=onward]").last.click()
        self.finished()
        self.assertTrue(self.answer().startswith(stopped[:40]))
        self.page.locator(".answer [data-action=again]").last.click()
        self.finished()
        expect(self.page.locator(".answer .branches")).to_contain_text("2 / 2")
        self.page.locator(".answer [data-action=left]").click()
        expect(self.page.locator(".answer .branches")).to_contain_text("1 / 2")
        self.assertTrue(self.answer().startswith(stopped[:40]))

    def test_an_edited_message_makes_a_branch_and_reload_keeps_all(self):
        self.ask("What is 47 + 38?")
        self.finished()
        self.assertIn("85", self.answer())
        self.ask("And why?")
        self.finished()
        self.page.locator(".user [data-action=edit]").first.click()
        self.page.locator(".edit-box textarea").fill("What is the capital of France?")
        self.page.keyboard.press("Enter")
        self.finished()
        self.assertIn("Paris", self.answer())
        expect(self.page.locator(".user .text")).to_have_text(["What is the capital of France?"])
        self.page.locator(".user [data-action=left]").click()
        expect(self.page.locator(".user .text")).to_have_text(["What is 47 + 38?", "And why?"])
        self.page.reload()
        self.page.wait_for_selector("html[data-ready]")
        expect(self.page.locator(".user .text")).to_have_text(["What is 47 + 38?", "And why?"])
        expect(self.page.locator(".user .branches")).to_contain_text("1 / 2")
        self.page.locator(".user [data-action=right]").click()
        expect(self.page.locator(".user .text")).to_have_text(["What is the capital of France?"])
        self.page.locator(".user [data-action=trash]").click()
        expect(self.page.locator(".user .text").first).to_have_text("What is 47 + 38?")
        self.page.get_by_role("button", name="Undo").click()
        expect(self.page.locator(".user .branches")).to_contain_text("2 / 2")

    def test_a_reload_keeps_what_had_come(self):
        self.endless()
        self.ask(STORY)
        expect(self.page.locator(ANSWER).last).to_contain_text(re.compile(r"(\w+\W+){20}"))
        before = self.answer()
        self.page.reload()
        self.page.wait_for_selector("html[data-ready]")
        expect(self.page.locator(".trouble").last).to_contain_text("What had come is kept")
        self.assertTrue(self.answer().startswith(before[:200]))
        self.page.unroute("**/v1/chat/completions")
        self.page.get_by_role("button", name="Continue", exact=True).click()
        self.finished()
        self.assertGreater(len(self.answer()), len(before) - 1)

    def test_thinking_is_folded(self):
        self.reply(sse(piece(role="assistant", reasoning_content=""), *[piece(reasoning_content=f"step {i} ") for i in range(12)],
                       piece(content="So it is."), LAST))
        self.ask("Think.")
        self.finished()
        self.assertEqual(self.answer(), "So it is.")
        summary = self.page.locator(".thinking summary")
        expect(summary).to_contain_text("12 tokens")
        expect(self.page.locator(".thinking .body")).to_be_hidden()
        summary.click()
        expect(self.page.locator(".thinking .body")).to_contain_text("step 0 step 1")
        expect(self.page.locator(".facts-button")).to_contain_text("75 % of drafts accepted")

    def test_the_request_has_what_was_set(self):
        bodies = []
        self.page.on("request", lambda r: bodies.append(json.loads(r.post_data)) if r.method == "POST" else None)
        self.say("Yes.")
        self.page.click("#settings-toggle")
        for name, value in {"system": "Be brief.", "temperature": "0,5", "top_p": "0.9", "seed": "7", "max_tokens": "50", "stop": "END\n\\n\\n"}.items():
            self.page.fill(f"#set-{name}", value)
        self.page.select_option("#set-effort", "number")
        self.page.fill("#set-effort_number", "30")
        self.ask("Ready?")
        self.finished()
        body = bodies[-1]
        self.assertEqual(body["messages"], [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Ready?"}])
        wanted = {"temperature": 0.5, "top_p": 0.9, "seed": 7, "max_tokens": 50, "stop": ["END", "\n\n"], "reasoning_effort": 30, "stream": True}
        self.assertEqual({k: body.get(k) for k in wanted}, wanted)
        self.assertNotIn("top_k", body)
        self.page.fill("#set-temperature", "hot")
        expect(self.page.locator("#wrong-temperature")).to_have_text("not a number")
        self.page.fill("#composer-text", "Again?")
        self.page.press("#composer-text", "Enter")
        expect(self.page.locator(".toast").last).to_contain_text("Not sent")
        expect(self.page.locator("#composer-text")).to_have_value("Again?")
        self.assertEqual(len(bodies), 1)

    def test_answers_follow_a_schema_and_bad_schemas_are_shown(self):
        self.page.click("#settings-toggle")
        self.page.check("#set-is_schema")
        self.page.fill("#set-schema", '{"type": "object",')
        expect(self.page.locator("#wrong-schema")).to_contain_text("not valid JSON")
        self.page.fill("#composer-text", "Who is the fox?")
        self.page.press("#composer-text", "Enter")
        expect(self.page.locator(".toast").last).to_contain_text("Not sent")
        self.page.fill("#set-schema", '{"type": "nonsense"}')
        self.ask("Who is the fox?")
        expect(self.page.locator(".trouble").last).to_be_visible()
        self.finished()
        self.page.fill("#set-schema", json.dumps({"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
                                                                                  "age": {"type": "integer", "maximum": 9, "minimum": 0}},
                                                  "required": ["name", "age"], "additionalProperties": False}))
        self.page.locator(".trouble [data-action=again]").last.click()
        self.finished()
        value = json.loads(self.page.locator(".answer pre code").last.inner_text())
        self.assertEqual(sorted(value), ["age", "name"])


class Markdown(Page):
    def test_blocks_and_inline_text(self):
        self.say(*SAMPLE)
        self.ask("Show.")
        self.finished()
        md = self.page.locator(ANSWER).last
        for selector, text in {".md-h2": "How it works", "strong": "bold", "em": "italic", "del": "struck", "p > code": "code", "blockquote p": "quoted",
                               "ol > li > ul > li:nth-child(1) strong": "one", "ol > li:nth-child(2)": "second", "td.align-end": "1,152"}.items():
            expect(md.locator(selector).first).to_have_text(text)
        self.assertEqual(md.locator("input:checked").count(), 1)
        self.assertEqual(md.locator("hr").count(), 1)
        link = md.locator("a")
        self.assertEqual([link.get_attribute(n) for n in ("href", "target")], ["https://example.org/a", "_blank"])
        self.assertIn("noopener", link.get_attribute("rel"))
        self.context.grant_permissions(["clipboard-read", "clipboard-write"])
        md.get_by_role("button", name="Copy code").click()
        self.page.wait_for_timeout(100)
        self.assertEqual(self.page.evaluate("navigator.clipboard.readText()"), "def f(n):\n    return n + 1  # next")
        self.page.set_viewport_size({"width": 1280, "height": 1250})
        self.shot("markdown_light")
        self.page.click("#theme")
        self.page.click("#theme")
        self.assertEqual(self.page.evaluate("document.documentElement.dataset.theme"), "dark")
        self.shot("markdown_dark")

    def test_the_pieces_that_a_text_comes_in_change_nothing(self):
        texts = [SAMPLE, ATTACK, "a\n\n- b\n  1. c\n\n     d\n- e\n", "**a *b** c*\n`` ` ``x", "> q\nlazy\n\n    code\n", "中**“强”**文 **x", "\\[\na_1\n\\]\n|a|b\n-|-\n1|2\n"]
        different = self.page.evaluate("""async (texts) => {
            const { MarkdownStream } = await import("/web/markdown.js");
            const html = (pieces) => {
                const el = document.createElement("div");
                const stream = new MarkdownStream(el);
                for (const piece of pieces) stream.append(piece);
                stream.finish();
                el.normalize();
                return el.innerHTML;
            };
            const cut = (text, n) => text.match(new RegExp(`[^]{1,${n}}`, "g"));
            return texts.filter((t) => [1, 2, 3, 7, 19].some((n) => html(cut(t, n)) !== html([t])));
        }""", texts)
        self.assertEqual(different, [])

    def test_time_grows_with_the_text_and_no_faster(self):
        small, large = self.page.evaluate("""async () => {
            const { MarkdownStream } = await import("/web/markdown.js");
            const time = (n) => {
                const el = document.createElement("div");
                document.body.append(el);
                const stream = new MarkdownStream(el);
                const start = performance.now();
                for (let i = 0; i < n; i++) stream.append(["word **bold** ", "- item `x`\\n", "```c\\nint x;\\n", "a **b _c [d"][(i / 50 | 0) % 4]);
                stream.finish();
                el.remove();
                return performance.now() - start;
            };
            time(500);
            const least = (n) => Math.min(time(n), time(n), time(n));
            return [least(1500), least(12000)];
        }""")
        # Eight times the text: quadratic would be 64 times the work, and half of that leaves room for a busy machine, which
        # the least of three runs each keeps small.
        self.assertLess(large, 32 * max(small, 5))

    def test_output_can_not_inject(self):
        self.say(*re.findall(r"(?s).{1,7}", ATTACK))
        self.ask(ATTACK.strip())
        self.finished()
        self.page.wait_for_timeout(300)
        self.assertIsNone(self.page.evaluate("window.pwned ?? null"))
        found = self.page.evaluate("""() => {
            const thread = document.querySelector("#thread");
            const bad = [...thread.querySelectorAll("script, img, iframe, object, embed, form, style, link, meta, base, video, audio")].map((e) => e.localName);
            for (const e of thread.querySelectorAll("*")) for (const a of e.attributes) {
                if (/^on/i.test(a.name) || a.name === "srcdoc" || (/^(href|src|action)$/.test(a.name) && !/^(https?:|mailto:|#i-)/.test(a.value))) bad.push(a.name + "=" + a.value);
            }
            return bad;
        }""")
        self.assertEqual(found, [])
        expect(self.page.locator(ANSWER).last).to_contain_text("<script>window.pwned = 1</script>")
        self.page.locator(".answer a").first.hover()
        self.assertIsNone(self.page.evaluate("window.pwned ?? null"))


class Faults(Page):
    def test_a_server_that_dies_is_shown_and_comes_back(self):
        own = Server()
        try:
            self.origin = own.origin
            self.page.close()
            self.requests.clear()
            self.page = self.open()
            self.endless(6000)
            self.ask(STORY)
            expect(self.page.locator(ANSWER).last).to_contain_text(re.compile(r"(\w+\W+){5}"))
            own.kill()
            trouble = self.page.locator(".trouble").last
            expect(trouble).to_contain_text("What had come is kept")
            self.assertGreater(len(self.answer()), 10)
            expect(self.page.locator("#notice")).to_contain_text("can't be reached", timeout=20_000)
            self.shot("server_gone")
            self.ask("Are you there?")
            expect(self.page.locator(".trouble").last).to_contain_text("can't be reached")
            own = Server(port=own.port)
            self.page.get_by_role("button", name="Try now").click()
            expect(self.page.locator("#notice")).to_be_hidden()
            self.page.unroute("**/v1/chat/completions")
            self.page.get_by_role("button", name="Try again").click()
            self.finished()
            self.assertGreater(len(self.answer()), 0)
        finally:
            own.kill()

    def test_a_busy_server_is_asked_again(self):
        self.reply('{"error": {"message": "the queue is full"}}', status=429, headers={"retry-after": "2"})
        self.ask("What is 47 + 38?")
        expect(self.page.locator(".trouble").last).to_contain_text(re.compile(r"busy. Next attempt in [12] s"))
        self.shot("busy")
        self.finished()
        self.assertIn("85", self.answer())

    def test_a_loading_server_can_be_cancelled(self):
        self.reply('{"error": {"message": "the model is being loaded"}}', status=503, headers={"retry-after": "30"})
        self.ask("What is 47 + 38?")
        expect(self.page.locator(".trouble").last).to_contain_text("not ready: the model is being loaded.")
        self.page.get_by_role("button", name="Cancel", exact=True).click()
        self.finished()
        expect(self.page.locator(".facts-button")).to_contain_text("stopped")

    def test_an_error_inside_a_stream_keeps_the_answer(self):
        self.reply(sse(piece(role="assistant", content="Half an "), piece(content="answer"), {"error": {"message": "memory ran out", "type": "server_error"}}, end=""))
        self.ask("Go on.")
        expect(self.page.locator(".trouble").last).to_contain_text("memory ran out")
        self.assertEqual(self.answer(), "Half an answer")
        self.reply(sse(piece(role="assistant", content="Cut "), end=""))
        self.page.locator(".answer [data-action=again]").last.click()
        expect(self.page.locator(".trouble").last).to_contain_text("before it was complete")

    def test_a_key_is_asked_for_and_kept_as_wished(self):
        own = Server("--api-key", "secret-key")
        try:
            self.origin = own.origin
            self.page.close()
            self.requests.clear()
            self.page = self.open()
            self.page.get_by_role("button", name="Enter the API key").click()
            expect(self.page.locator("#set-key")).to_be_focused()
            self.page.fill("#set-key", "secret-key")
            self.page.press("#set-key", "Tab")
            expect(self.page.locator("#notice")).to_be_hidden()
            self.ask("What is 47 + 38?")
            self.finished()
            self.assertIn("85", self.answer())
            storage = "[sessionStorage.getItem('deepinfer.key'), localStorage.getItem('deepinfer.key')]"
            self.assertEqual(self.page.evaluate(storage), ["secret-key", None])
            self.page.check("#set-remember")
            self.assertEqual(self.page.evaluate(storage), [None, "secret-key"])
            stats = self.open("/stats")
            expect(stats.locator("#server-text")).not_to_have_text(re.compile("Connecting|key"))
        finally:
            own.kill()


class History(Page):
    def test_search_rename_delete_export_and_import(self):
        for text in ("First about walnuts", "Second about rivers"):
            self.say("Noted.")
            self.page.click("#new-chat")
            self.ask(text)
            self.finished()
        rows = self.page.locator(".conv a")
        expect(rows).to_have_text(["Second about rivers", "First about walnuts"])
        self.page.fill("#search", "WALNUT")
        expect(rows).to_have_text(["First about walnuts"])
        self.page.fill("#search", "")
        expect(rows).to_have_count(2)
        self.page.locator(".conv .icon-button").first.click()
        self.page.get_by_role("button", name="Rename", exact=True).click()
        self.page.fill("#ask-input", "Rivers <b>")
        self.page.keyboard.press("Enter")
        expect(rows.first).to_have_text("Rivers <b>")
        with self.page.expect_download() as download:
            self.page.click("#export")
        path = os.path.join(OUT, "conversations.json")
        download.value.save_as(path)
        self.page.locator(".conv .icon-button").first.click()
        self.page.get_by_role("button", name="Delete", exact=True).click()
        expect(rows).to_have_text(["First about walnuts"])
        self.page.set_input_files("#import-file", path)
        expect(rows).to_have_count(3)
        self.page.locator(".conv a", has_text="Rivers").click()
        expect(self.page.locator(".user .text")).to_have_text(["Second about rivers"])
        with open(path, "w", encoding="utf-8") as file:
            file.write('{"format": "deepinfer-conversations", "conversations": [{"messages": [{"role": "root"}]}]}')
        self.page.set_input_files("#import-file", path)
        expect(self.page.locator(".toast").last).to_contain_text("was not imported")
        os.remove(path)

    def test_two_tabs_write_beside_each_other(self):
        self.say("One.")
        self.ask("From the first tab")
        self.finished()
        other = self.open("/" + self.page.evaluate("location.hash"))
        expect(other.locator(".user .text")).to_have_text(["From the first tab"])
        self.endless()
        self.ask("More from the first tab")
        expect(other.locator(".trouble:visible")).to_contain_text("in another tab")
        self.page.keyboard.press("Escape")
        self.finished()
        expect(other.locator(".trouble:visible")).to_have_count(0)
        self.ask("From the second tab", other)
        self.finished(other)
        expect(self.page.locator(".user .text")).to_have_text(["From the first tab", "More from the first tab", "From the second tab"])
        other.close()


class Access(Page):
    def test_keys_alone(self):
        self.page.reload()
        self.page.wait_for_selector("html[data-ready]")
        self.page.focus("#new-chat")
        self.page.keyboard.press("Shift+Tab")
        expect(self.page.locator(".skip")).to_be_focused()
        self.page.keyboard.press("Enter")
        expect(self.page.locator("#composer-text")).to_be_focused()
        self.page.keyboard.type("One")
        self.page.keyboard.press("Shift+Enter")
        self.page.keyboard.type("two")
        expect(self.page.locator("#composer-text")).to_have_value("One\ntwo")
        # While an input method composes, Enter takes its suggestion.
        self.page.evaluate("""document.querySelector("#composer-text").dispatchEvent(
            new KeyboardEvent("keydown", { key: "Enter", bubbles: true, cancelable: true, isComposing: true }))""")
        expect(self.page.locator(".user")).to_have_count(0)
        self.say("Done.")
        self.page.keyboard.press("Enter")
        self.finished()
        expect(self.page.locator(".user .text")).to_have_text(["One\ntwo"])
        expect(self.page.locator("#composer-text")).to_be_focused()
        self.page.keyboard.press("ArrowUp")
        expect(self.page.locator(".edit-box textarea")).to_be_focused()
        self.page.keyboard.press("Escape")
        expect(self.page.locator(".edit-box")).to_have_count(0)
        self.page.keyboard.press("Control+/")
        expect(self.page.locator("#help")).to_be_visible()
        self.page.keyboard.press("Escape")
        expect(self.page.locator("#help")).to_be_hidden()
        self.page.keyboard.press("Alt+s")
        expect(self.page.locator("#set-system")).to_be_focused()
        self.page.keyboard.press("Alt+s")
        self.page.keyboard.press("Control+k")
        expect(self.page.locator("#search")).to_be_focused()
        self.page.keyboard.press("Alt+n")
        expect(self.page.locator("#composer-text")).to_be_focused()
        expect(self.page.locator(".user")).to_have_count(0)
        # Tab goes through every control that can be seen, and shows where it is.
        seen = set()
        for _ in range(40):
            self.page.keyboard.press("Tab")
            seen.add(self.page.evaluate("document.activeElement.id || document.activeElement.className"))
        for name in ("new-chat", "search", "theme", "settings-toggle", "effort-quick", "attach", "composer-text"):
            self.assertIn(name, seen)

    def names(self, page):
        session = self.context.new_cdp_session(page)
        nodes = session.send("Accessibility.getFullAXTree")["nodes"]
        roles = ("button", "link", "textbox", "searchbox", "combobox", "checkbox", "meter", "img", "DisclosureTriangle")
        return [n["role"]["value"] for n in nodes
                if not n["ignored"] and n["role"]["value"] in roles and not n.get("name", {}).get("value", "").strip()]

    def contrast(self, page, selectors):
        """The least contrast of text and background among what the selectors find."""
        return page.evaluate("""(selectors) => {
            const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
            const rgba = (color) => {
                canvas.clearRect(0, 0, 1, 1);
                canvas.fillStyle = color;
                canvas.fillRect(0, 0, 1, 1);
                const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
                return [r, g, b, a / 255];
            };
            const behind = (el) => {
                for (; el; el = el.parentElement) {
                    const c = rgba(getComputedStyle(el).backgroundColor);
                    if (c[3] > 0.99) return c;
                }
                return [255, 255, 255, 1];
            };
            const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, w, i) => {
                const v = c[i] / 255;
                return sum + w * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            }, 0);
            let least = [99, ""];
            for (const s of selectors) for (const el of document.querySelectorAll(s)) {
                const [a, b] = [light(rgba(getComputedStyle(el).color)), light(behind(el))].sort((x, y) => y - x);
                const ratio = (a + 0.05) / (b + 0.05);
                if (ratio < least[0]) least = [ratio, s];
            }
            return least;
        }""", selectors)

    def test_every_control_has_a_name_and_texts_have_contrast(self):
        self.reply(sse(piece(role="assistant", reasoning_content="hm"), piece(content=SAMPLE), LAST),
                   sse(piece(role="assistant", content="x"), {"error": {"message": "broken"}}, end=""))
        self.ask("Show.")
        self.finished()
        self.ask("Again.")
        self.finished()
        self.page.click("#settings-toggle")
        self.page.check("#set-is_schema")
        self.page.select_option("#set-effort", "number")
        self.assertEqual(self.names(self.page), [])
        roles = self.page.evaluate("""["nav", "header", "main", "aside"].map((s) => document.querySelectorAll("#app " + s).length > 0)""")
        self.assertEqual(roles, [True] * 4)
        self.assertEqual(self.page.locator("h1").count(), 1)
        stats = self.open("/stats")
        stats.wait_for_selector(".tiles dd")
        self.assertEqual(self.names(stats), [])
        for scheme in ("light", "dark"):
            self.page.emulate_media(color_scheme=scheme)
            stats.emulate_media(color_scheme=scheme)
            for page, selectors in ((self.page, [".md p", ".md code", ".md a", ".md [class^=hl-]", ".user .text", ".trouble span", ".trouble button", ".facts-button",
                                                 ".conv a", ".conversations h2", ".field label", ".hint", ".wrong", "#server-text", "#context-text",
                                                 "#effort-quick", ".thinking summary", ".chip", "#title"]),
                                    (stats, [".tiles dt", ".tiles dd", ".tiles small", ".plot h2", ".legend li", ".plot summary", ".hint"])):
                ratio, where = self.contrast(page, selectors)
                self.assertGreaterEqual(ratio, 4.5, f"{where} in the {scheme} scheme")

    def test_text_from_right_to_left(self):
        self.say("שלום **עולם**\n\n- אחת\n\nplain `code`")
        self.ask("שלום")
        self.finished()
        directions = self.page.evaluate("""[...document.querySelectorAll(".answer .md:not(.body) > *, .user .text")].map((e) => getComputedStyle(e).direction)""")
        self.assertEqual(directions, ["rtl", "rtl", "rtl", "ltr"])

    def test_reduced_motion_and_the_switch_of_colours(self):
        self.page.emulate_media(reduced_motion="reduce")
        background = "getComputedStyle(document.body).backgroundColor"
        light = self.page.evaluate(background)
        self.page.click("#theme")
        self.assertEqual(self.page.evaluate(background), light)
        self.page.click("#theme")
        dark = self.page.evaluate(background)
        self.assertNotEqual(dark, light)
        self.page.reload()
        self.page.wait_for_selector("html[data-ready]")
        self.assertEqual(self.page.evaluate(background), dark)


class Phone(Page):
    viewport = PHONE
    scheme = "dark"

    def test_narrow_screens(self):
        self.shot("phone_start")
        self.say(SAMPLE + "\n```\n" + "a long line of code " * 20 + "\n```\n" + "unbroken" * 40)
        self.ask("A question that takes more than one line of a narrow screen to be read.")
        self.finished()
        self.shot("phone_chat")
        wide = "document.documentElement.scrollWidth > innerWidth || document.querySelector('#scroller').scrollWidth > innerWidth"
        self.assertFalse(self.page.evaluate(wide))
        self.page.click("#side-toggle")
        expect(self.page.locator("#sidebar")).to_be_visible()
        self.shot("phone_list")
        self.page.keyboard.press("Escape")
        expect(self.page.locator("#sidebar")).to_be_hidden()
        self.page.click("#settings-toggle")
        self.shot("phone_settings")
        self.assertTrue(self.page.evaluate("document.querySelector('#centre').inert"))
        self.page.keyboard.press("Escape")
        expect(self.page.locator("#settings")).to_be_hidden()
        small = self.page.evaluate("""[...document.querySelectorAll("header button, header a, .composer button")].filter((e) => e.offsetWidth).filter(
            (e) => e.offsetWidth < 40 || e.offsetHeight < 40).filter((e) => e.id !== "title").map((e) => e.id)""")
        self.assertEqual(small, [])


class Statistics(Page):
    def test_plots_follow_the_server(self):
        stats = self.open("/stats")
        self.endless(1500)
        self.ask(STORY)
        expect(stats.locator("#server-text")).not_to_have_text("Connecting")
        stats.wait_for_function("""() => [...document.querySelectorAll(".plot")].slice(0, 3).every((p) =>
            [...p.querySelectorAll(".chart .series")].every((e) => (e.getAttribute("d") || "").includes("L")))""", timeout=10_000)
        self.assertEqual(stats.locator(".plot").count(), 9)
        self.assertNotIn("NaN", stats.locator("#plots").inner_html())
        tokens = stats.locator(".plot", has_text="Tokens a second")
        tokens.locator("summary").click()
        expect(tokens.locator("tbody tr").nth(1)).to_be_visible()
        chart = tokens.locator(".chart")
        chart.hover()
        expect(tokens.locator(".tip")).to_contain_text("output")
        tokens.locator("summary").click()
        chart.focus()
        stats.keyboard.press("End")
        expect(tokens.locator(".tip")).to_contain_text("prompt")
        stats.locator("#pause").click()
        expect(stats.locator("#pause")).to_have_attribute("aria-label", "Go on")
        self.shot("stats_light", stats)
        stats.emulate_media(color_scheme="dark")
        stats.set_viewport_size(PHONE)
        stats.wait_for_timeout(200)
        self.assertFalse(stats.evaluate("document.documentElement.scrollWidth > innerWidth"))
        self.shot("stats_phone_dark", stats)
        self.finished()


class Screens(Page):
    def test_pictures_of_the_chat_page(self):
        with urllib.request.urlopen(server.origin + "/") as reply:
            policy = reply.headers["content-security-policy"]
        for part in ("default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"):
            self.assertIn(part, policy)
        self.shot("start_light")
        self.ask(STORY)
        self.finished()
        self.shot("chat_light")
        self.page.click("#settings-toggle")
        self.page.emulate_media(color_scheme="dark")
        self.shot("chat_dark")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
