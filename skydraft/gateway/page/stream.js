// Server-sent events out of a response's body, as the JSON values they carry.

function dataOf(block) {
  const lines = block.split(/\r\n|\r|\n/).filter((line) => line.startsWith('data:'));
  return lines.map((line) => line.slice(5).replace(/^ /, '')).join('\n');
}

/** Yields each event's value until `[DONE]`; comments are skipped. Returns whether `[DONE]` came. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = '';
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return false;
      const blocks = (held + value).split(/\r\n\r\n|\n\n|\r\r/);
      held = blocks.pop();
      for (const data of blocks.map(dataOf)) {
        if (data === '[DONE]') return true;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    // Leaving early closes the connection, which is what stops the generation.
    reader.cancel().catch(() => {});
  }
}
