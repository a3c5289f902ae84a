// Use the types that openapi-typescript generated from openapi.yaml: send, prepare, commit, roll back, read.
//
//   RMQ_URL=http://127.0.0.1:8000/api/rmq RMQ_TOKEN=... node smoke.js TOPIC
//
// Prints what it saw as JSON.
import createClient from "openapi-fetch";
import type { components, paths } from "./schema.js";

declare const process: { argv: string[]; env: Record<string, string> };

const topic = process.argv[2];
const consumer = crypto.randomUUID();
const client = createClient<paths>({
  baseUrl: process.env.RMQ_URL,
  headers: { Authorization: `Token ${process.env.RMQ_TOKEN}` },
});
const path = { topic };

// What went wrong has the type of an error; what is left has that of the answer.
function good<T>({ data, error }: { data?: T; error?: components["schemas"]["Problem"] }): T {
  if (data === undefined) throw new Error(`${error?.code}: ${error?.detail}`);
  return data;
}

async function take() {
  const body = { consumer, max: 1, wait: 5 };
  const taken = good(await client.POST("/v1/topics/{topic}/prepare/", { params: { path }, body }));
  if (taken.messages.length !== 1) throw new Error(`took ${taken.messages.length} messages`);
  return taken.messages[0];
}

const messages = [0, 1, 2].map((n) => ({ body: { shop: 1, n }, priority: 100 - n }));
const sent = good(await client.POST("/v1/topics/{topic}/messages/", { params: { path }, body: { messages } }));
const done = await take();
const failed = await take();
const commit = { deliveries: [{ id: done.id, receipt: done.receipt }] };
const committed = [];
for (const _ of [1, 2])
  committed.push(good(await client.POST("/v1/topics/{topic}/commit/", { params: { path }, body: commit })));
const failure = { id: failed.id, receipt: failed.receipt, error: "Timeout: no answer", reject: true };
const rolledBack = good(
  await client.POST("/v1/topics/{topic}/rollback/", { params: { path }, body: { deliveries: [failure] } }),
);
const dead = good(
  await client.GET("/v1/topics/{topic}/messages/", { params: { path, query: { state: "dead" } } }),
);
const stats = good(await client.GET("/v1/stats/"));
const refused = await client.POST("/v1/topics/{topic}/messages/", { params: { path }, body: { body: 1 } });
const unknown = await client.GET("/v1/topics/{topic}/", { params: { path: { topic: "nothing" } } });
// @ts-expect-error: a number is no consumer.
void (() => client.POST("/v1/topics/{topic}/prepare/", { params: { path }, body: { consumer: 1 } }));

console.log(
  JSON.stringify({
    sent: sent.outcomes,
    taken: [done.body, failed.body],
    committed: committed.map((one) => one.outcomes),
    rolled_back: rolledBack.outcomes,
    dead: dead.results.map((one) => [one.body, one.error]),
    stats: stats.results.find((one) => one.topic === topic),
    refused: [refused.error?.code, unknown.error?.code],
  }),
);
