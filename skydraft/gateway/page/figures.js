// The figures of an answer, summed over its rounds.

export const ORIGINS = ['accepted', 'recovered', 'bonus', 'skipped', 'edge', 'cloud', 'edge-fallback'];

const ratio = (part, whole) => (whole ? part / whole : null);

export class Figures {
  tokens = 0;
  calls = 0; // times that the device waited for the large model
  written = 0; // tokens that the large model wrote itself
  seconds = 0;
  audited = 0;
  agreed = 0;
  origins = {};
  rounds = [];
  stats = {}; // the gateway's own figures: unlike ours, without the time to the browser

  /** Counts the `skydraft` part of one chunk, which came `ms` after the request. */
  take({ num_tokens: tokens = 0, origin, record, stats, usage, receipt }, ms) {
    if (tokens) {
      this.seconds = ms / 1000;
      this.firstSeconds ??= this.seconds;
    }
    this.tokens += tokens;
    if (origin) this.origins[origin] = (this.origins[origin] ?? 0) + tokens;
    if (record) this.#round(record);
    if (stats) Object.assign(this, { stats, usage, receipt });
  }

  #round(record) {
    this.rounds.push(record);
    if (record.outcome === 'verified') this.calls += 1;
    if (['verified', 'written'].includes(record.outcome)) this.written += record.num_committed - record.num_accepted;
    this.audited += record.num_audited;
    this.agreed += record.num_agreed;
  }
}

/** A share in whole percents; 100 % and 0 % only if exact. */
export function percent(share) {
  if (share === null) return null;
  if (share > 0.99 && share < 1) return '>99%';
  if (share > 0 && share < 0.01) return '<1%';
  return `${Math.round(share * 100)}%`;
}

const figures = {
  calls: ({ stats, calls, tokens }) => (stats.cloud_calls_per_token ?? ratio(calls, tokens))?.toFixed(2),
  written: ({ stats, written, tokens }) => percent(stats.target_written_per_token ?? ratio(written, tokens)),
  agreement: ({ agreed, audited }) => (audited ? `${percent(agreed / audited)} (${agreed}/${audited})` : null),
  watched: ({ stats: { audits } }) => percent(audits?.agreement ?? null),
  speed: ({ stats, tokens, seconds }) => (stats.tokens_per_s || ratio(tokens, seconds))?.toFixed(1),
  tokens: ({ tokens }) => tokens || null,
};

/** All figures as text, by name; null if unknown. */
export const shown = (of) => Object.fromEntries(Object.entries(figures).map(([name, say]) => [name, say(of) ?? null]));
