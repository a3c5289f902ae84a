// Consume a topic over REST with Node's own fetch (Node 18 or newer, no packages).
//
//   RMQ_URL=http://127.0.0.1:8000/api/rmq RMQ_TOKEN=... node consume.mjs TOPIC [COUNT]
//
// Ends after COUNT messages (default: never). What `work` throws is tried again, as the topic's settings say.
import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";

const [topic, count = "Infinity"] = process.argv.slice(2);
const consumer = randomUUID();
let stopping = false;
for (const signal of ["SIGINT", "SIGTERM"]) process.on(signal, () => (stopping = true));

async function work(message) {
  if (message.body?.fail) throw new Error("the body says so");
  console.log(JSON.stringify(message.body));
}

async function post(verb, body) {
  const response = await fetch(`${process.env.RMQ_URL}/v1/topics/${topic}/${verb}/`, {
    method: "POST",
    headers: { Authorization: `Token ${process.env.RMQ_TOKEN}`, "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal: AbortSignal.timeout(40_000),
  });
  if (response.ok) return await response.json();
  // A proxy between, or a wrong address, answers anything.
  const answer = await response.json().catch(() => ({ code: response.statusText, detail: response.url }));
  const error = new Error(`${response.status} ${answer.code}: ${answer.detail}`);
  // Nothing that is said again helps, but where the server is in trouble.
  error.mayHelp = response.status === 429 || response.status >= 500 || response.headers.has("Retry-After");
  error.status = response.status;
  error.wait = Number(response.headers.get("Retry-After")) || 2;
  throw error;
}

async function untilAnswered(verb, body) {
  for (;;) {
    try {
      return await post(verb, body);
    } catch (error) {
      if (error.mayHelp === false) throw error;
      console.error(`${verb}: ${error.message}`);
      await sleep(1000 * (error.wait ?? 2));
    }
  }
}

let done = 0;
let lost = false;
while (!stopping && done < Number(count)) {
  let taken;
  try {
    // After a lost answer nobody knows what was handed out: ask that first.
    taken = await post("prepare", lost ? { consumer, held: true } : { consumer, max: 10, wait: 20 });
    lost = false;
  } catch (error) {
    if (error.mayHelp === false && !(lost && error.status === 409)) throw error;
    console.error(`prepare: ${error.message}`);
    // With SERIAL False nobody knows (409): what was handed out comes again when it times out.
    lost = error.mayHelp !== false;
    await sleep(1000 * (error.wait ?? 2));
    continue;
  }
  // Too many wait already, so the server has answered at once.
  if (taken.wait_refused) await sleep(1000);
  const waiting = taken.messages.map(({ id, receipt }) => ({ id, receipt }));
  // While one is worked on, the others must not time out either.
  const heartbeat = setInterval(() => {
    if (waiting.length) post("extend", { deliveries: waiting }).catch((error) => console.error(error.message));
  }, (taken.timeout * 1000) / 3);
  try {
    for (const message of taken.messages) {
      if (stopping || done >= Number(count)) break;
      const { id, receipt } = message;
      let verb = "commit";
      let delivery = { id, receipt };
      try {
        await work(message);
      } catch (error) {
        verb = "rollback";
        delivery = { id, receipt, error: `${error.name}: ${error.message}` };
      }
      const answer = await untilAnswered(verb, { deliveries: [delivery] });
      if (answer.outcomes.stale) console.error(`${id} had timed out, or was settled before`);
      waiting.shift();
      done += 1;
    }
  } finally {
    clearInterval(heartbeat);
  }
  // What has not begun goes back with nothing spent.
  if (waiting.length) await untilAnswered("release", { deliveries: waiting });
}
