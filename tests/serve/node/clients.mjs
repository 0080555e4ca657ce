// What users of the JavaScript clients write; prints one line of JSON per check.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { experimental_generateImage as generateImage } from "ai";
import sdwebui from "node-sd-webui";
import OpenAI, { toFile } from "openai";

const base = process.argv[2];
const say = (name, value) => console.log(JSON.stringify({ name, value }));
const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "any", maxRetries: 0 });
const common = { model: "inweave/emoji", prompt: "a red apple", size: "128x128", steps: 2, seed: 3 };

const answer = await client.images.generate({ ...common, loras: [{ name: "pixel", strength: 0.5 }] });
say("generate", answer.data[0].b64_json.length > 1000);

const types = [];
for await (const event of await client.images.generate({ ...common, steps: 4, stream: true, partial_images: 1 })) types.push(event.type);
say("stream", types);

const picture = Buffer.from(answer.data[0].b64_json, "base64");
const edited = await client.images.edit({
  ...common,
  image: await toFile(picture, "a.png", { type: "image/png" }),
  loras: [{ name: "pixel", weight: 0.5 }, { name: "ink", weight: 0.1 }],
});
say("edit", edited.data.length);

try {
  await client.images.generate({ ...common, model: "nosuch" });
} catch (error) {
  say("error", [error.status, error.constructor.name]);
}

const provider = createOpenAICompatible({ name: "inweave", baseURL: `${base}/v1` });
const { image } = await generateImage({
  model: provider.imageModel("inweave/emoji"), prompt: "a red apple", size: "128x128",
  providerOptions: { inweave: { steps: 2 } },
});
say("ai-sdk", image.base64.length > 1000);

const webui = sdwebui({ apiUrl: base });
const drawn = await webui.txt2img({ prompt: "a red apple <lora:pixel:0.8>", steps: 2, width: 128, height: 128, seed: 3 });
say("node-sd-webui", drawn.images.length);
