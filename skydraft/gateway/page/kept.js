// Conversations that this browser keeps; nothing of them is on the server. The oldest make room for new ones.

const MOST = 100;
const MOST_LETTERS = 50e6;
const STORES = ['heads', 'turns']; // {id, title, changed, length} to list, and the turns of each as JSON

let opening = null;

function database() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open('skydraft', 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore('heads', { keyPath: 'id' });
      request.result.createObjectStore('turns');
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opening;
}

/** Does `work` on the stores in one transaction, and returns the result of the request that it made last. */
async function inStores(mode, work) {
  const open = await database();
  return new Promise((resolve, reject) => {
    const transaction = open.transaction(STORES, mode);
    const request = work(...STORES.map((name) => transaction.objectStore(name)));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

export const headOf = (id) => inStores('readonly', (heads) => heads.get(id));

/** What is kept, newest first. */
export async function allHeads() {
  const found = await inStores('readonly', (heads) => heads.getAll());
  return found.sort((one, other) => other.changed - one.changed);
}

export const turnsOf = async (id) => JSON.parse(await inStores('readonly', (_, turns) => turns.get(id)));

export async function keep(head, turns) {
  const text = JSON.stringify(turns);
  await inStores('readwrite', (heads, texts) => {
    texts.put(text, head.id);
    return heads.put({ ...head, length: text.length });
  });
  let letters = 0;
  for (const [at, { id, length }] of (await allHeads()).entries()) {
    letters += length;
    if (at >= MOST || (at && letters > MOST_LETTERS)) await forget(id);
  }
}

/** Changes nothing but the title: a turn may have been kept since the list was drawn. */
export const rename = (id, title) => inStores('readwrite', (heads) => {
  const found = heads.get(id);
  found.onsuccess = () => found.result && heads.put({ ...found.result, title });
  return found;
});

export const forget = (id) => inStores('readwrite', (heads, turns) => {
  turns.delete(id);
  return heads.delete(id);
});
