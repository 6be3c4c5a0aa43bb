// Unpacks the Chromium of npm next to this file's copy, and the libraries that it may lack.
import { execFileSync } from "node:child_process";
import { chmodSync, createReadStream, createWriteStream, mkdirSync } from "node:fs";
import { pipeline } from "node:stream/promises";
import { createBrotliDecompress } from "node:zlib";

const from = "node_modules/@sparticuz/chromium/bin";
const unpack = (name, to) => pipeline(createReadStream(`${from}/${name}.br`), createBrotliDecompress(), createWriteStream(to));
mkdirSync("lib", { recursive: true });
await unpack("chromium", "headless-chromium");
chmodSync("headless-chromium", 0o755);
await unpack("al2023.tar", "lib/al2023.tar");
execFileSync("tar", ["-xf", "al2023.tar", "--strip-components=1"], { cwd: "lib" });
